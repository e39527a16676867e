-- How many weight versions the tokens of one rollout come from.
SELECT versions, count(*) AS rollouts
FROM fates
WHERE versions IS NOT NULL
GROUP BY versions
ORDER BY versions
