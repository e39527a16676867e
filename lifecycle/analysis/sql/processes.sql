-- One row per process: where it begins, and whether it ended in order. The few lines that say so are looked up apart.
SELECT process, first_row, started, began, ended, n_lines, stopped IS NOT NULL AS closed
FROM (
    SELECT process, min(rowid) AS first_row, min(ts) AS began, max(ts) AS ended, count(*) AS n_lines
    FROM lines GROUP BY process
)
LEFT JOIN (SELECT process, min(about) AS started FROM lines WHERE event = 'engine.started' GROUP BY process) USING (process)
LEFT JOIN (SELECT process, min(ts) AS stopped FROM lines WHERE event = 'engine.stopped' GROUP BY process) USING (process)
ORDER BY began, first_row
