"""Mixed-integer programs of rematerialization on HiGHS."""
