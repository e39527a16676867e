-- How long the gate stood in each state, summed over processes.
SELECT source::VARCHAR AS state, count(*) AS n, coalesce(sum(seconds::DOUBLE), 0) AS seconds, quantiles(seconds) AS q, max(seconds) AS longest
FROM lines
WHERE event = 'gate.transition' AND dest <> source
GROUP BY source
ORDER BY seconds DESC
