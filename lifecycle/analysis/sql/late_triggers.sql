-- Aborts and discards that came too late: declared, and without effect.
SELECT source::VARCHAR AS state, word_of(trigger) AS trigger, count(*) AS n
FROM lines
WHERE event = 'rollout.transition' AND dest = source
GROUP BY ALL
ORDER BY n DESC
