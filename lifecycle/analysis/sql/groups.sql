-- What became of groups; time from submit to the event, and for settled ones the wait for the slowest member.
SELECT event::VARCHAR AS event, reason::VARCHAR AS reason, count(*) AS n, sum(tokens)::BIGINT AS tokens,
    quantiles(seconds) AS q, max(seconds) AS longest, quantiles(straggler_s) AS straggler_q,
    avg(CASE WHEN seconds > 0 THEN at_most(straggler_s / seconds, 1) END) AS straggler_share
FROM (SELECT *, CASE WHEN event = 'group.settled' AND isfinite(about::FLOAT) THEN about::FLOAT END AS straggler_s FROM lines)
WHERE event IN ('group.settled', 'group.delivered', 'group.failed', 'group.filtered', 'group.stale', 'group.carried')
GROUP BY ALL
ORDER BY n DESC
