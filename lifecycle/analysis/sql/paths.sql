-- The rollouts that rollouts.sql could not tell in order: their states by time, their last line, tokens lost unseen
-- between two processes, and tokens that they brought along from before these logs. One hexadecimal digit a move.
CREATE TABLE paths AS
WITH told AS (
    SELECT
        rollout, ts, event, source, dest, tokens,
        CASE WHEN event = 'rollout.restored' THEN coalesce(extra, 0) ELSE 0 END AS dropped,
        row_number() OVER story AS place,
        lag(tokens) OVER story AS tokens_before,
        lag(dest) OVER story AS state_before,
        process <> lag(process) OVER story AS elsewhere
    FROM lines
    WHERE rollout IN (SELECT rollout FROM rollouts WHERE is_long)
    WINDOW story AS (PARTITION BY rollout ORDER BY ts, lines.rowid)
)
SELECT
    rollout,
    string_agg(substr('123456789abcdef', digit_of(dest), 1), '' ORDER BY place DESC)
        FILTER (dest <> source OR (event = 'rollout.restored' AND dest IS DISTINCT FROM state_before)) AS path,
    enum_code(arg_max(dest, place)) AS state,
    arg_max(tokens, place) AS tokens,
    max(ts) - min(ts) AS duration_s,
    sum(greatest(coalesce(tokens_before::BIGINT - tokens - dropped, 0), 0))
        FILTER (elsewhere)::UBIGINT AS lost_unseen,
    sum(tokens) FILTER (event = 'rollout.restored' AND tokens_before IS NULL)::UBIGINT AS brought
FROM told
GROUP BY rollout
