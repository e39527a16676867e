-- Rollouts whose story stops in the middle: not at rest at the end of the logs. The oldest first.
SELECT state, last_row, closed, lines.ts
FROM fates
JOIN lines ON lines.rowid = last_row
JOIN processes ON processes.process = lines.process
WHERE NOT at_rest(fates.state)
ORDER BY lines.ts, last_row
