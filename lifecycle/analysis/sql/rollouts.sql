-- One row per rollout. `path` holds the first 32 moves, four bits for each, so that no sort is needed; a rollout with
-- more lines, or that came from a snapshot, is told in order by paths.sql. Columns ending in `_pack`: see macros.sql.
CREATE TABLE rollouts AS
SELECT
    rollout,
    min(rowid)::UINTEGER AS first_row,
    max(packed(rowid, enum_code(dest))) AS state_pack,
    max(packed(rowid, tokens)) AS tokens_pack,
    max(CASE WHEN dest <> source THEN packed(rowid, coalesce(enum_code(reason) + 1, 0)) END) AS reason_pack,
    max(CASE WHEN event = 'rollout.disposition'
        THEN packed(rowid, enum_code(disposition)::UBIGINT * 1000000 + least(coalesce(extra + 1, 0), 999999)::UBIGINT)
    END) AS disposition_pack,
    max(CASE WHEN event = 'rollout.rest' THEN seconds END) AS duration_s,
    max(versions) AS versions,
    max(attempt) AS attempts,
    bool_or(event = 'rollout.restored' OR seq > 32) OR count(*) <> max(seq) AS is_long,
    bit_or(CASE WHEN dest <> source
        THEN (least(enum_code(dest), 14) + 1)::UHUGEINT << (4 * (seq - 1) % 128)::UHUGEINT ELSE 0 END) AS path
FROM lines
WHERE rollout IS NOT NULL
GROUP BY rollout
