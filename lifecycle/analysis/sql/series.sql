-- Over time, in {buckets} parts: requests sent and ended, and tokens where they were generated (spread over a stream).
-- What a process had in flight when its log ends is over with it: `cut_off`.
WITH span AS (SELECT {began}::DOUBLE AS began, {width}::DOUBLE AS width),
moves AS (
    SELECT process, least(floor((ts - {began}::DOUBLE) / {width}::DOUBLE), {buckets} - 1)::INTEGER AS bucket,
        count(*) FILTER (trigger = 'dispatch') AS dispatched,
        count(*) FILTER (in_flight(source) AND NOT in_flight(dest)) AS ended
    FROM lines
    WHERE event = 'rollout.transition'
    GROUP BY ALL
),
cut_off AS (
    SELECT least(floor((any_value(processes.ended) - began) / width), {buckets} - 1)::INTEGER AS bucket,
        sum(moves.dispatched) - sum(moves.ended) AS cut_off
    FROM moves JOIN processes USING (process), span
    GROUP BY process, began, width
),
streams AS (
    SELECT began + first_token_s AS first, greatest(ended, began + first_token_s + 1e-3) AS last, tokens
    FROM flights WHERE tokens > 0 AND ended IS NOT NULL AND first_token_s IS NOT NULL
),
parts AS (
    SELECT tokens, first, last,
        unnest(range(bucket_of((first - began) / width, {buckets}), bucket_of((last - began) / width, {buckets}) + 1)) AS bucket
    FROM streams, span
),
rates AS (
    SELECT least(bucket, {buckets} - 1)::INTEGER AS bucket,
        sum(tokens * greatest(0, least(last, began + (bucket + 1) * width) - greatest(first, began + bucket * width))
            / nullif(last - first, 0))
            * {sample} / any_value(width) AS tokens_per_s
    FROM parts, span
    GROUP BY least(bucket, {buckets} - 1)
)
SELECT bucket, began + bucket * width AS ts, coalesce(dispatched, 0)::BIGINT AS dispatched,
    coalesce(ended, 0)::BIGINT AS ended, coalesce(cut_off, 0)::BIGINT AS cut_off, coalesce(tokens_per_s, 0) AS tokens_per_s
FROM span, range({buckets}) AS numbers(bucket)
LEFT JOIN (SELECT bucket, sum(dispatched) AS dispatched, sum(ended) AS ended FROM moves GROUP BY bucket) AS moved USING (bucket)
LEFT JOIN rates USING (bucket)
LEFT JOIN (SELECT bucket, sum(cut_off) AS cut_off FROM cut_off GROUP BY bucket) AS lost USING (bucket)
ORDER BY bucket
