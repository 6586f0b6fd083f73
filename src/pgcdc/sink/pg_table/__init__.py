"""The adapter `pg_table`: events as rows of a table, or applied to tables like those of the source."""
