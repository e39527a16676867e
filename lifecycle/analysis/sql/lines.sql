-- The staging table: narrow on purpose, since five million rows of it are held in memory. Enums hold the vocabulary
-- of this version and of the tables found in the logs. Lines that begin with "--strict" belong to a strict reading,
-- those with "--default" to any other.
CREATE TABLE lines (
    event event_name,
    ts DOUBLE,
    process UINTEGER,
    rollout UBIGINT,
    --default seq UTINYINT,
    --strict seq UINTEGER,
    attempt USMALLINT,
    trigger trigger_name,
    source state_name,
    dest state_name,
    tokens UINTEGER,
    reason reason_name,
    disposition disposition_name,
    seconds FLOAT,
    extra UINTEGER,
    --strict new_tokens UINTEGER,
    --strict dropped_tokens UINTEGER,
    --strict rid UBIGINT,
    --strict spans_fit BOOLEAN,
    about VARCHAR
)
