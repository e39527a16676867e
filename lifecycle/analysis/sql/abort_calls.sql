-- What the abort calls cost, by strategy: requests made, answers, and the time of a call.
WITH calls AS (
    SELECT about->>'strategy' AS strategy, about->>'status' AS status, about->>'worker' AS worker,
        (about->>'requests')::BIGINT AS requests, (about->>'round')::INTEGER AS round, seconds
    FROM lines WHERE event = 'abort.sent'
)
SELECT strategy, count(*) AS answers, sum(requests)::BIGINT AS requests, count(DISTINCT worker) AS workers,
    count(*) FILTER (status = 'accepted') AS accepted,
    count(*) FILTER (status = 'refused') AS refused,
    count(*) FILTER (status = 'unreachable') AS unreachable,
    max(round) AS rounds, quantiles(seconds) AS q
FROM calls
GROUP BY strategy
ORDER BY answers DESC
