-- How often which time occurred: steps of a tenth of a decade, so that 10 ms and 10 minutes fit one picture.
SELECT floor(log10(greatest(seconds, 1e-4)) * 10)::INTEGER AS tenth, count(*) AS n
FROM lines
WHERE {which} AND seconds IS NOT NULL
GROUP BY tenth
ORDER BY tenth
