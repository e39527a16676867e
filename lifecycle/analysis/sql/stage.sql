-- One compact row per line, in the order of the file: row n of a file is its n-th line that is not blank.
-- Names become hashes (read again from the line itself where one must be shown), states become enums, `extra` is the
-- one more number that an event has, and what only rare events carry goes to `about`; of a line's own
-- rid the last twelve characters are kept. A damaged line has no event.
INSERT INTO lines
SELECT
    event,
    ts,
    (hash(process_id) & 4294967295)::UINTEGER,
    CASE WHEN seq IS NOT NULL THEN hash(rollout_id) END,
    seq,
    attempt,
    trigger,
    source,
    coalesce(dest, state),
    tokens,
    reason,
    disposition,
    coalesce(dwell_s, duration_s, latency_s),
    coalesce(dropped_tokens, straggler_s, lag, versions)::FLOAT,
    (hash(worker) & 4294967295)::UINTEGER,
    --strict new_tokens,
    --strict CASE WHEN rollout_id IS NULL THEN hash(group_id) ELSE hash(rid) END,
    --strict spans IS NULL OR spans_fit(spans, tokens),
    -- Most lines are a rollout's, and are done with first.
    CASE WHEN seq IS NOT NULL AND event <> 'rollout.restored'
        THEN CASE WHEN source = 'aborting' AND dest <> 'aborting' THEN right(rid, 12) END
        ELSE CASE
            WHEN event = 'rollout.restored' THEN from_process
            WHEN event = 'stream.anomaly' THEN kind
            WHEN event = 'abort.sent' THEN json_object(
                'strategy', strategy, 'worker', worker, 'status', status, 'requests', requests, 'round', round,
                'rids', try_cast(rids AS JSON))::VARCHAR
            WHEN event = 'gate.transition' THEN mode
            WHEN event = 'engine.started' THEN json_object(
                'process_id', process_id, 'run_id', run_id, 'tables', try_cast(tables AS JSON))::VARCHAR
            --strict WHEN event IN ('group.settled', 'group.delivered') THEN try_cast(members AS JSON)::VARCHAR
        END
    END
FROM {source}
