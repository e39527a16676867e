-- What weight updates interrupted, and which modes were used.
SELECT
    (SELECT count(*) FROM lines WHERE event = 'gate.transition' AND dest = 'pausing' AND source = 'open') AS updates,
    (SELECT list(DISTINCT about) FROM lines WHERE event = 'gate.transition' AND about IS NOT NULL) AS modes,
    count(*) FILTER (trigger = 'abort' AND dest <> source) AS interrupted,
    coalesce(sum(tokens) FILTER (trigger = 'abort' AND dest <> source), 0)::BIGINT AS interrupted_tokens
FROM lines
WHERE event = 'rollout.transition' AND reason = 'weight_update'
