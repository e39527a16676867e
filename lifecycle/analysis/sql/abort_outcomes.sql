-- How aborts ended, and how long they took (time in `aborting`); one that found nothing in flight took none.
SELECT
    CASE WHEN source <> 'aborting' THEN 'never_sent' ELSE CASE trigger
        WHEN 'confirm' THEN 'confirmed' WHEN 'finish' THEN 'finished' WHEN 'lose' THEN 'lost'
        WHEN 'expire' THEN 'expired' WHEN 'reject' THEN 'rejected' ELSE word_of(trigger) END END AS outcome,
    count(*) AS n,
    quantiles(CASE WHEN source = 'aborting' THEN seconds END) AS q,
    max(CASE WHEN source = 'aborting' THEN seconds END) AS longest,
    sum(tokens)::BIGINT AS tokens
FROM lines
WHERE event = 'rollout.transition'
    AND ((source = 'aborting' AND dest <> 'aborting') OR (source = 'pending' AND trigger = 'abort'))
GROUP BY outcome
ORDER BY n DESC
