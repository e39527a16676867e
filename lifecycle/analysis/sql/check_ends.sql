-- The last line of every rollout in a process whose log was closed: it must be at rest.
SELECT * FROM (
    SELECT max(lines.rowid) AS row_number, arg_max(dest, lines.rowid)::VARCHAR AS state_before,
        CASE WHEN arg_max(dest, lines.rowid) = 'aborting' THEN 'abort_unresolved' ELSE 'no_end' END AS kind
    FROM lines JOIN processes USING (process)
    WHERE rollout IS NOT NULL AND closed AND dest IS NOT NULL
    GROUP BY rollout, process
)
WHERE NOT at_rest(state_before)
