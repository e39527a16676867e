-- Requests sent between two lines of a gate that say it was not open.
WITH shut AS (
    SELECT * FROM (
        SELECT process, lines.rowid AS from_row, dest AS state_before,
            lead(lines.rowid, 1, 9223372036854775807) OVER (PARTITION BY process ORDER BY lines.rowid) AS to_row
        FROM lines WHERE event = 'gate.transition'
    )
    WHERE state_before <> 'open'
),
sent AS (SELECT process, lines.rowid AS row_number FROM lines WHERE trigger = 'dispatch')
SELECT row_number, state_before::VARCHAR AS state_before, 'dispatch_gate_closed' AS kind
FROM sent ASOF JOIN shut ON sent.process = shut.process AND sent.row_number > shut.from_row
WHERE row_number < to_row
