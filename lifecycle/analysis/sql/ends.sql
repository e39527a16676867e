-- Where every rollout is: state, what the caller did with it, and why it is there; with the tokens it holds.
SELECT state, disposition, reason, count(*) AS rollouts, sum(tokens)::BIGINT AS tokens,
    sum(lost_unseen)::BIGINT AS lost_unseen, sum(brought)::BIGINT AS brought
FROM fates
GROUP BY ALL
ORDER BY rollouts DESC, state, disposition, reason
