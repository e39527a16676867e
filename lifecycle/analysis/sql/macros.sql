-- least() and greatest() of this database pass over null: they are only given what is not.
-- Last value in the order of rows without a sort: the row number and a value in one integer, of which max() is taken.
CREATE OR REPLACE MACRO packed(row_number, value) AS (row_number::UBIGINT << 28::UBIGINT) | value::UBIGINT;
CREATE OR REPLACE MACRO unpacked(pack) AS pack & 268435455::UBIGINT;
CREATE OR REPLACE MACRO at_most(value, top) AS CASE WHEN value IS NOT NULL THEN least(value, top) END;
-- Of states, one hexadecimal digit from 1 on.
CREATE OR REPLACE MACRO digit_of(state) AS at_most(enum_code(state), 14) + 1;
CREATE OR REPLACE MACRO state_of(code) AS (enum_range(NULL::state_name))[code::INTEGER + 1]::VARCHAR;
-- A word that stands in no table is null.
CREATE OR REPLACE MACRO word_of(word) AS coalesce(word::VARCHAR, 'unknown');
CREATE OR REPLACE MACRO reason_of(code) AS (enum_range(NULL::reason_name))[code::INTEGER + 1]::VARCHAR;
CREATE OR REPLACE MACRO disposition_of(code) AS (enum_range(NULL::disposition_name))[code::INTEGER + 1]::VARCHAR;
CREATE OR REPLACE MACRO in_flight(state) AS state IN ('streaming', 'partial', 'aborting');
CREATE OR REPLACE MACRO at_rest(state) AS state IN ('aborted', 'completed', 'failed', 'discarded');
-- Which of `n` parts of the time a moment falls into, whatever the times say; its end counts as a part, too.
CREATE OR REPLACE MACRO bucket_of(share, n) AS greatest(0, least(n, floor(share)))::BIGINT;
CREATE OR REPLACE MACRO quantiles(seconds) AS quantile_cont(seconds, [0.5, 0.95, 0.99]);
-- Whether [version, start, end, source] spans are in order, do not overlap and stay within the tokens.
CREATE OR REPLACE MACRO spans_fit(spans, tokens) AS coalesce(
    list_bool_and(list_transform(spans, lambda span, place:
        span[2]::BIGINT < span[3]::BIGINT AND span[3]::BIGINT <= tokens
        AND (place = 1 OR span[2]::BIGINT >= spans[place - 1][3]::BIGINT))), true);
