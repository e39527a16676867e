-- Handed over more than once: the second line of a rollout or of a group that says delivered. And groups whose tokens
-- are not the sum over their members, where all members are known.
WITH handed AS (
    SELECT lines.rowid AS row_number, event, lineage, coalesce(rollout, rid) AS what
    FROM lines JOIN processes USING (process)
    WHERE (event = 'rollout.disposition' AND disposition = 'delivered') OR event = 'group.delivered'
),
numbered AS (
    SELECT row_number, row_number() OVER story AS n, lag(row_number) OVER story AS before_row
    FROM handed
    WINDOW story AS (PARTITION BY event, lineage, what ORDER BY row_number)
),
sums AS (
    SELECT handed.row_number, any_value(lines.tokens) AS said, sum(last.tokens)::BIGINT AS held,
        count(*) AS members, count(last.tokens) AS known
    FROM (
        SELECT row_number, lineage, unnest(from_json(about, '["VARCHAR"]')) AS member
        FROM handed JOIN lines ON lines.rowid = row_number
        WHERE handed.event = 'group.delivered'
    ) AS handed
    JOIN lines ON lines.rowid = handed.row_number
    LEFT JOIN (
        SELECT rollout, arg_max(tokens, lines.rowid) AS tokens
        FROM lines WHERE event = 'rollout.disposition' AND disposition = 'delivered' GROUP BY rollout
    ) AS last ON last.rollout = CASE WHEN lineage = 0 THEN hash(member) ELSE hash(hash(member), lineage) END
    GROUP BY handed.row_number
)
SELECT row_number, before_row, NULL AS tokens_before, 'delivered_twice' AS kind FROM numbered WHERE n > 1
UNION ALL
SELECT row_number, NULL, held, 'tokens_mismatch' FROM sums WHERE members = known AND said <> held
