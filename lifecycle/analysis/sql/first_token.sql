-- Time from dispatch to the first token of an attempt, seconds.
SELECT count(*) AS n, quantiles(seconds) AS q, max(seconds) AS longest
FROM lines
WHERE event = 'rollout.transition' AND source = 'streaming' AND dest = 'partial'
