-- Latency and outcome of aborts by the strategy that was used for them. Each batch is unfolded once.
WITH batches AS (
    SELECT about->>'strategy' AS strategy, about->>'rids' AS rids
    FROM lines WHERE event = 'abort.sent'
    GROUP BY ALL
),
asked AS (
    SELECT rid, min(strategy) AS strategy
    FROM (SELECT strategy, right(unnest(from_json(rids, '["VARCHAR"]')), 12) AS rid FROM batches)
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
