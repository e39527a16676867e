-- How many published versions behind the oldest token of a rollout was when it was delivered.
SELECT lag, count(*) AS rollouts
FROM fates
WHERE disposition = 'delivered' AND lag IS NOT NULL
GROUP BY lag
ORDER BY lag
