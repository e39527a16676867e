-- Rows that cannot be a whole line of a known event: nothing could be read, or a key that its event must have could not.
SELECT rowid
FROM lines
WHERE event IS NULL
    OR ts IS NULL OR ts NOT BETWEEN 0 AND {end_of_time}
    OR NOT isfinite(seconds)
    OR process IS NULL
    OR (rollout IS NULL AND event IN ('rollout.transition', 'rollout.restored', 'rollout.rest', 'rollout.disposition'))
    OR (rollout IS NOT NULL AND (attempt IS NULL OR tokens IS NULL OR dest IS NULL))
    OR (event IN ('rollout.transition', 'gate.transition')
        AND (trigger IS NULL OR source IS NULL OR dest IS NULL OR seconds IS NULL))
ORDER BY rowid
