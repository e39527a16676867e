-- Last value in the order of rows without a sort: the row number and a value in one integer, of which max() is taken.
CREATE MACRO packed(row_number, value) AS (row_number::UBIGINT << 28::UBIGINT) | value::UBIGINT;
CREATE MACRO unpacked(pack) AS pack & 268435455::UBIGINT;
CREATE MACRO state_of(code) AS (enum_range(NULL::state_name))[code::INTEGER + 1]::VARCHAR;
CREATE MACRO reason_of(code) AS (enum_range(NULL::reason_name))[code::INTEGER + 1]::VARCHAR;
CREATE MACRO disposition_of(code) AS (enum_range(NULL::disposition_name))[code::INTEGER + 1]::VARCHAR;
CREATE MACRO in_flight(state) AS state IN ('streaming', 'partial', 'aborting');
CREATE MACRO at_rest(state) AS state IN ('aborted', 'completed', 'failed', 'discarded');
CREATE MACRO quantiles(seconds) AS quantile_cont(seconds, [0.5, 0.95, 0.99]);
-- Whether [version, start, end, source] spans are in order, do not overlap and stay within the tokens.
CREATE MACRO spans_fit(spans, tokens) AS coalesce(
    list_bool_and(list_transform(spans, lambda span, place:
        span[2]::BIGINT < span[3]::BIGINT AND span[3]::BIGINT <= tokens
        AND (place = 1 OR span[2]::BIGINT >= spans[place - 1][3]::BIGINT))), true);
