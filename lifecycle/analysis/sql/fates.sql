-- The rollouts as a reader wants them: names instead of packs, long ones corrected.
CREATE VIEW fates AS
SELECT
    rollouts.rollout,
    tokens_pack >> 28::UBIGINT AS last_row,
    state_of(coalesce(paths.state, unpacked(move_pack) // 256)) AS state,
    coalesce(paths.tokens, unpacked(tokens_pack)) AS tokens,
    CASE WHEN unpacked(move_pack) % 256 > 0 THEN reason_of(unpacked(move_pack) % 256 - 1) END AS reason,
    coalesce(disposition_of(unpacked(disposition_pack) // 1000000), 'none') AS disposition,
    CASE WHEN unpacked(disposition_pack) % 1000000 > 0
        THEN (unpacked(disposition_pack) % 1000000)::INTEGER - 1 END AS lag,
    coalesce(paths.duration_s, rollouts.duration_s) AS duration_s,
    versions,
    attempts,
    coalesce(paths.path, replace(lower(hex(rollouts.path)), '0', '')) AS path,
    coalesce(lost_unseen, 0) AS lost_unseen,
    coalesce(brought, 0) AS brought
FROM rollouts
LEFT JOIN paths USING (rollout)
