-- What was odd and changed nothing, by kind.
SELECT about AS kind, count(*) AS n, min(rowid) AS first_row
FROM lines
WHERE event = 'stream.anomaly'
GROUP BY ALL
ORDER BY n DESC
