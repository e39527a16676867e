-- Every move that was made: how often, and the time spent in its source (seconds: p50, p95, p99).
SELECT word_of(source) AS source, word_of(trigger) AS trigger, word_of(dest) AS dest,
    count(*) AS n, quantiles(seconds) AS q, max(seconds) AS longest
FROM lines
WHERE event = '{event}'
GROUP BY ALL
ORDER BY n DESC, source, trigger
