-- A rollout in several processes: the next may not go on from a final state or with fewer tokens if the log before it
-- was closed (after a crash the store may know less than the log), and only one may have an attempt in flight. A copy
-- that was given up because another owner has the rollout (reason fenced) hands nothing over and ends when it wakes.
WITH stays AS (
    SELECT rollout, process, closed,
        min(ts) AS began, min(lines.rowid) AS first_row, max(lines.rowid) AS last_row,
        arg_min(dest, lines.rowid) AS first_state, arg_max(dest, lines.rowid) AS last_state,
        arg_min(tokens, lines.rowid)::BIGINT AS first_tokens, arg_max(tokens, lines.rowid)::BIGINT AS last_tokens,
        arg_min(CASE WHEN event = 'rollout.restored' THEN coalesce(dropped_tokens, 0) ELSE 0 END, lines.rowid)::BIGINT AS dropped,
        min(ts) FILTER (trigger = 'dispatch') AS first_dispatch,
        max(ts) FILTER (in_flight(source) OR in_flight(dest)) AS last_flight,
        max(lines.rowid) FILTER (in_flight(source) OR in_flight(dest)) AS last_flight_row,
        bool_or(event = 'rollout.disposition' AND coalesce(reason = 'fenced', false)) AS fenced
    FROM lines JOIN processes USING (process)
    WHERE rollout IN (
        SELECT rollout FROM lines WHERE rollout IS NOT NULL GROUP BY rollout HAVING min(process) <> max(process))
    GROUP BY ALL
),
ordered AS (
    SELECT *,
        lag(closed) OVER story AS closed_before, lag(last_state) OVER story AS state_before,
        lag(last_tokens) OVER story AS tokens_before, lag(last_row) OVER story AS before_row,
        lead(first_dispatch) OVER story AS dispatched_next
    FROM stays
    WHERE NOT fenced
    WINDOW story AS (PARTITION BY rollout ORDER BY began, first_row)
)
SELECT row_number, before_row, state_before::VARCHAR AS state_before, tokens_before, tokens_expected, false AS tokens_may_grow,
    other_process, kind
FROM (
    SELECT first_row AS row_number, before_row, state_before, tokens_before, tokens_before - dropped AS tokens_expected,
        false AS other_process,
        CASE
            WHEN closed_before AND state_before IN ('completed', 'failed', 'discarded') AND first_state <> state_before
                THEN 'after_final'
            WHEN closed_before AND first_tokens < tokens_before - dropped THEN 'tokens_fell'
            WHEN closed_before AND first_tokens > tokens_before - dropped THEN 'tokens_mismatch'
        END AS kind
    FROM ordered
    UNION ALL
    SELECT last_flight_row, NULL, last_state, NULL, NULL, true,
        CASE WHEN last_flight > dispatched_next THEN 'two_live_attempts' END
    FROM ordered
)
WHERE kind IS NOT NULL
