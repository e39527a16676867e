-- Every line of a rollout against the one before it in the same process. The first rule that a line breaks is its
-- verdict; after a gap nothing is said about what may have stood in it.
WITH told AS (
    SELECT
        lines.rowid AS row_number, process, rollout, event, seq, attempt, trigger, source, dest, tokens, new_tokens, rid, spans_fit,
        CASE WHEN event IN ('rollout.transition', 'rollout.restored') THEN coalesce(dropped_tokens, 0) ELSE 0 END::BIGINT AS dropped,
        lag(lines.rowid) OVER story AS before_row,
        (lag(seq) OVER story)::BIGINT AS seq_before,
        lag(dest) OVER story AS state_before,
        (lag(tokens) OVER story)::BIGINT AS tokens_before,
        lag(attempt) OVER story AS attempt_before,
        lag(rid) OVER story AS rid_before
    FROM lines
    WHERE rollout IS NOT NULL
    WINDOW story AS (PARTITION BY rollout, process ORDER BY lines.rowid)
),
ruled AS (
    SELECT told.*, rules.initial, list_contains(rules.finals, state_before::VARCHAR) AS was_final,
        seq_before IS NULL OR (seq = 1 AND at_rest(state_before)
            AND (event = 'rollout.restored' OR source::VARCHAR = rules.initial)) AS fresh,
        event = 'rollout.transition' AND in_flight(source) AND source <> 'streaming' AS may_grow,
        CASE WHEN event = 'rollout.transition' THEN tokens_before + new_tokens - dropped ELSE tokens_before END AS tokens_due
    FROM told JOIN rules USING (process)
),
judged AS (
    SELECT row_number, before_row, seq_before, state_before::VARCHAR AS state_before, tokens_before, attempt_before,
        tokens_due AS tokens_expected, may_grow AS tokens_may_grow,
        CASE
            WHEN fresh AND seq <> 1 THEN 'seq_gap'
            WHEN fresh AND event <> 'rollout.restored' AND (source IS NULL OR source::VARCHAR <> initial) THEN 'broken_chain'
            WHEN fresh AND event = 'rollout.transition' AND of_process IS NULL THEN 'undeclared_move'
            WHEN fresh THEN CASE WHEN NOT spans_fit THEN 'tokens_mismatch' END
            WHEN seq <> seq_before + 1 THEN 'seq_gap'
            WHEN dest IS NULL OR state_before IS NULL THEN NULL
            WHEN was_final AND dest <> state_before AND event IN ('rollout.transition', 'rollout.restored') THEN 'after_final'
            WHEN was_final AND event = 'rollout.transition' AND source <> dest THEN 'after_final'
            WHEN event = 'rollout.restored' THEN CASE WHEN in_flight(state_before) THEN 'two_live_attempts' END
            WHEN trigger = 'dispatch' AND in_flight(state_before) THEN 'two_live_attempts'
            WHEN trigger IS DISTINCT FROM 'dispatch' AND (attempt <> attempt_before OR rid IS DISTINCT FROM rid_before)
                THEN 'two_live_attempts'
            WHEN coalesce(source, dest) <> state_before THEN 'broken_chain'
            WHEN event <> 'rollout.transition' AND dest <> state_before THEN 'broken_chain'
            WHEN event = 'rollout.transition' AND of_process IS NULL THEN 'undeclared_move'
            WHEN dropped > 0 AND trigger IS DISTINCT FROM 'restore' THEN 'tokens_fell'
            WHEN tokens < tokens_before - dropped THEN 'tokens_fell'
            WHEN NOT spans_fit THEN 'tokens_mismatch'
            WHEN may_grow AND tokens < tokens_due THEN 'tokens_mismatch'
            WHEN NOT may_grow AND tokens <> tokens_due THEN 'tokens_mismatch'
        END AS kind,
        spans_fit
    FROM ruled
    LEFT JOIN legal ON of_process = process AND from_state = source AND by_trigger = trigger AND to_state = dest
)
SELECT * REPLACE (CASE WHEN NOT spans_fit AND kind = 'tokens_mismatch' THEN NULL ELSE tokens_expected END AS tokens_expected)
FROM judged
WHERE kind IS NOT NULL
