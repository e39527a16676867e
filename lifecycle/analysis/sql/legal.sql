-- Which moves each process's own table allows, in the enums of the staging table.
CREATE OR REPLACE TABLE legal AS
SELECT process AS of_process, source::state_name AS from_state, trigger::trigger_name AS by_trigger, dest::state_name AS to_state
FROM arcs
