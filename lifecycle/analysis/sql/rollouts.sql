-- One row per rollout. `path` holds the first 32 moves, four bits for each, so that no sort is needed; a rollout with
-- more lines, or that came from a snapshot, is told in order by paths.sql. Columns ending in `_pack`: see macros.sql.
-- Few and narrow aggregates: there are as many of each as rollouts, beside the lines in memory.
CREATE TABLE rollouts AS
SELECT
    rollout,
    max(packed(rowid, at_most(tokens, 268435455))) AS tokens_pack,
    max(CASE WHEN dest <> source
        THEN packed(rowid, enum_code(dest)::UBIGINT * 256 + coalesce(enum_code(reason) + 1, 0)) END) AS move_pack,
    max(CASE WHEN event = 'rollout.disposition'
        THEN packed(rowid, enum_code(disposition)::UBIGINT * 1000000 + coalesce(at_most(extra, 999998) + 1, 0)::UBIGINT)
    END) AS disposition_pack,
    max(CASE WHEN event = 'rollout.rest' THEN seconds END) AS duration_s,
    max(CASE WHEN event = 'rollout.rest' THEN extra END) AS versions,
    max(attempt) AS attempts,
    -- Brought back, more lines than `path` holds, lines missing, or none that moves it.
    max(if(event = 'rollout.restored', 33, seq)) AS last_seq,
    last_seq > 32 OR count(*) <> last_seq OR move_pack IS NULL AS is_long,
    bit_or(CASE WHEN dest <> source
        THEN digit_of(dest)::UHUGEINT << ((seq::UBIGINT + 31) % 32 * 4)::UHUGEINT END) AS path
FROM lines
WHERE rollout IS NOT NULL
GROUP BY rollout
