-- Time to first token and tokens per second of one stream, by worker.
SELECT worker, count(*) AS sampled, quantiles(first_token_s) AS first_token,
    quantile_cont(tokens / (ended - began - first_token_s), 0.5) FILTER (tokens > 1 AND ended - began > first_token_s)
        AS tokens_per_s,
    sum(tokens)::BIGINT AS tokens
FROM flights
WHERE ended IS NOT NULL
GROUP BY worker
