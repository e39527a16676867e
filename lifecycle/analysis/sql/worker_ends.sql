-- How attempts ended, by the worker that served them.
SELECT extra AS worker, min(rowid) AS first_row, count(*) AS attempts,
    count(*) FILTER (trigger = 'finish') AS finished,
    count(*) FILTER (source = 'aborting') AS aborted,
    count(*) FILTER (trigger = 'preempt') AS preempted,
    count(*) FILTER (trigger = 'lose') AS lost,
    count(*) FILTER (trigger = 'reject') AS rejected,
    count(*) FILTER (trigger = 'expire') AS expired
FROM lines
WHERE event = 'rollout.transition' AND in_flight(source) AND NOT in_flight(dest)
GROUP BY worker
ORDER BY attempts DESC
