-- Make a rollout of one lineage another than the rollout of that id in a lineage that knows nothing of it.
UPDATE lines
SET rollout = hash(rollout, processes.lineage)
FROM processes
WHERE processes.process = lines.process AND processes.lineage > 0 AND lines.rollout IS NOT NULL
