-- Forget what was staged, and the words that were known.
DROP TABLE lines;
DROP TYPE event_name;
DROP TYPE state_name;
DROP TYPE trigger_name;
DROP TYPE reason_name;
DROP TYPE disposition_name
