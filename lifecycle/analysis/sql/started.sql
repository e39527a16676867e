-- What each process said about itself.
SELECT about FROM lines WHERE event = 'engine.started' AND about IS NOT NULL
