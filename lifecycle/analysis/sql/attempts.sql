-- How many attempts rollouts needed.
SELECT attempts, count(*) AS rollouts, sum(tokens)::BIGINT AS tokens
FROM fates
GROUP BY attempts
ORDER BY attempts
