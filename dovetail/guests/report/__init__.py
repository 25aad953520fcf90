"""`dovetail report` and `dovetail compare`: a run's costs in detail, as JSON, tables and HTML pages."""
