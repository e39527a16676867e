-- One compact row per line, in the order of the file: row n of a file is its n-th line that is not blank.
-- Names become hashes (read again from the line itself where one must be shown), states become enums, and what only
-- rare events carry goes to `about`; of rids the last twelve characters are kept. A damaged line has no event.
-- `extra` is the one more number that an event has: a move out of flight and an abort call their worker, other moves the
-- tokens that they dropped, a rest its versions, a disposition its lag. Where only the first 32 lines of a rollout are
-- told by their `seq`, any number above stands for all.
INSERT INTO lines
SELECT
    event,
    ts,
    CASE WHEN process_id IS NOT NULL THEN (hash(process_id) & 4294967295)::UINTEGER END,
    CASE WHEN seq IS NOT NULL AND rollout_id IS NOT NULL THEN hash(rollout_id) END,
    --default if(seq > 64, 64, seq),
    --strict seq,
    attempt,
    trigger,
    source,
    coalesce(dest, state),
    tokens,
    reason,
    disposition,
    coalesce(dwell_s, duration_s, latency_s),
    CASE
        WHEN (event = 'rollout.transition' AND in_flight(source)) OR event = 'abort.sent'
            THEN CASE WHEN worker IS NOT NULL THEN (hash(worker) & 4294967295)::UINTEGER END
        WHEN event IN ('rollout.transition', 'rollout.restored') THEN dropped_tokens
        WHEN event = 'rollout.rest' THEN versions
        WHEN event = 'rollout.disposition' THEN try_cast(lag AS UINTEGER)
    END,
    --strict new_tokens,
    --strict dropped_tokens,
    --strict CASE WHEN rollout_id IS NULL THEN hash(group_id) ELSE hash(rid) END,
    --strict spans IS NULL OR spans_fit(spans, tokens),
    -- Most lines are a rollout's, and are done with first.
    CASE WHEN seq IS NOT NULL AND event <> 'rollout.restored'
        THEN CASE WHEN source = 'aborting' AND dest <> 'aborting' THEN right(rid, 12) END
        ELSE CASE
            WHEN event = 'rollout.restored' THEN from_process
            WHEN event = 'stream.anomaly' THEN kind
            WHEN event = 'abort.sent' THEN json_object(
                'strategy', strategy, 'status', status, 'requests', requests, 'round', round,
                'rids', list_transform(rids, lambda one: right(one, 12)))::VARCHAR
            WHEN event = 'gate.transition' THEN mode
            WHEN event = 'engine.started' THEN json_object(
                'process_id', process_id, 'run_id', run_id, 'tables', try_cast(tables AS JSON))::VARCHAR
            WHEN event = 'group.settled' THEN straggler_s::VARCHAR
            --strict WHEN event = 'group.delivered' THEN try_cast(members AS JSON)::VARCHAR
        END
    END
FROM {source}
