-- Attempts, each from dispatch to its end; of every {sample}th rollout, as percentiles and rates need no more.
CREATE TABLE flights AS
SELECT
    rollout,
    min(ts) FILTER (trigger = 'dispatch') AS began,
    max(ts) FILTER (in_flight(source) AND NOT in_flight(dest)) AS ended,
    max(CASE WHEN trigger = 'observe' THEN seconds END) AS first_token_s,
    max(CASE WHEN in_flight(source) AND NOT in_flight(dest) THEN extra END) AS worker,
    max(CASE WHEN in_flight(source) THEN tokens END)::BIGINT - max(CASE WHEN trigger = 'dispatch' THEN tokens END)
        AS tokens
FROM lines
WHERE event = 'rollout.transition' AND trigger IS DISTINCT FROM 'restore' AND rollout % {sample} = 0
GROUP BY rollout, process, attempt
HAVING began IS NOT NULL
