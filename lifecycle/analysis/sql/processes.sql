-- One row per process: where it begins, and whether it ended in order.
SELECT
    process,
    min(rowid) AS first_row,
    min(about) FILTER (event = 'engine.started') AS started,
    min(ts) AS began,
    max(ts) AS ended,
    count(*) AS n_lines,
    bool_or(event = 'engine.stopped') AS closed
FROM lines
GROUP BY process
ORDER BY began, first_row
