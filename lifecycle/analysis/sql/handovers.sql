-- Which process took rollouts over from which.
SELECT DISTINCT process, about AS from_process
FROM lines
WHERE event = 'rollout.restored' AND about IS NOT NULL
