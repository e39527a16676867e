-- Every line of a gate against the one before it in the same process, and against the table.
WITH told AS (
    SELECT lines.rowid AS row_number, process, trigger, source, dest,
        lag(lines.rowid) OVER story AS before_row, lag(dest) OVER story AS state_before
    FROM lines
    WHERE event = 'gate.transition'
    WINDOW story AS (PARTITION BY process ORDER BY lines.rowid)
)
SELECT * FROM (
    SELECT row_number, before_row, state_before::VARCHAR AS state_before,
        CASE WHEN source <> state_before THEN 'broken_chain' WHEN of_process IS NULL THEN 'undeclared_move' END AS kind
    FROM told
    LEFT JOIN legal ON of_process = process AND from_state = source AND by_trigger = trigger AND to_state = dest
)
WHERE kind IS NOT NULL
