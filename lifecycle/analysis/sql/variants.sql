-- The sequences of states that rollouts went through.
SELECT path, count(*) AS rollouts, quantile_cont(duration_s, 0.5) AS p50, sum(tokens)::BIGINT AS tokens
FROM fates
GROUP BY path
ORDER BY rollouts DESC, path
