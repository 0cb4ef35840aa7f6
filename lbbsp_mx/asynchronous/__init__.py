"""Training without barriers, by SSP, ASP, DSSP and ElasticBSP."""
