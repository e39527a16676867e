-- What the abort calls cost, by strategy: requests made, answers, and the time of a call.
WITH calls AS (
    SELECT from_json(about, '{"strategy": "VARCHAR", "status": "VARCHAR", "requests": "BIGINT", "round": "INTEGER"}') AS call,
        extra AS worker, seconds
    FROM lines WHERE event = 'abort.sent'
)
SELECT call.strategy AS strategy, count(*) AS answers, sum(call.requests)::BIGINT AS requests,
    count(DISTINCT worker) AS workers,
    count(*) FILTER (call.status = 'accepted') AS accepted,
    count(*) FILTER (call.status = 'refused') AS refused,
    count(*) FILTER (call.status = 'unreachable') AS unreachable,
    max(call.round) AS rounds, quantiles(seconds) AS q
FROM calls
GROUP BY call.strategy
ORDER BY answers DESC
