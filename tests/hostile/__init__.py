"""Files with damaged or forged content, and readers that must refuse or survive them."""
