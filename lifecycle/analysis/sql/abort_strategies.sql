-- Latency and outcome of aborts by the strategy that was used for them. Each batch is unfolded once.
WITH calls AS (
    SELECT from_json(about, '{"strategy": "VARCHAR", "rids": "VARCHAR"}') AS call
    FROM lines WHERE event = 'abort.sent'
),
batches AS (
    SELECT DISTINCT call.strategy, call.rids FROM calls
),
asked AS (
    SELECT rid, min(strategy) AS strategy
    FROM (SELECT strategy, unnest(from_json(rids, '["VARCHAR"]')) AS rid FROM batches)
    GROUP BY rid
)
SELECT strategy, count(*) AS n, quantiles(seconds) AS q, max(seconds) AS longest,
    count(*) FILTER (trigger = 'confirm') AS confirmed,
    count(*) FILTER (trigger = 'finish') AS finished,
    count(*) FILTER (trigger = 'lose') AS lost,
    count(*) FILTER (trigger = 'expire') AS expired,
    count(*) FILTER (trigger = 'reject') AS rejected
FROM lines JOIN asked ON asked.rid = lines.about
WHERE event = 'rollout.transition' AND source = 'aborting'
GROUP BY strategy
ORDER BY n DESC
