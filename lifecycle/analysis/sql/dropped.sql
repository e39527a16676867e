-- Tokens that were thrown away at a restore or with a crash, and tokens that a resume kept.
SELECT
    coalesce(reason::VARCHAR, 'unknown') AS reason,
    count(*) FILTER (trigger = 'restore') AS resumes,
    coalesce(sum(tokens) FILTER (trigger = 'restore'), 0)::BIGINT AS kept,
    count(*) FILTER (extra > 0) AS drops,
    coalesce(sum(extra), 0)::BIGINT AS dropped
FROM lines
WHERE (event = 'rollout.transition' AND trigger = 'restore' AND NOT in_flight(source)) OR event = 'rollout.restored'
GROUP BY ALL
ORDER BY dropped DESC, reason
