-- What became of groups; time from submit to the event, and for settled ones the wait for the slowest member.
SELECT event::VARCHAR AS event, reason::VARCHAR AS reason, count(*) AS n, sum(tokens)::BIGINT AS tokens,
    quantiles(seconds) AS q, max(seconds) AS longest, quantiles(CASE WHEN event = 'group.settled' THEN extra / 10000 END) AS straggler_q,
    avg(CASE WHEN event = 'group.settled' AND seconds > 0 AND extra IS NOT NULL THEN least(extra / 10000 / seconds, 1) END)
        AS straggler_share
FROM lines
WHERE event IN ('group.settled', 'group.delivered', 'group.failed', 'group.filtered', 'group.stale', 'group.carried')
GROUP BY ALL
ORDER BY n DESC
