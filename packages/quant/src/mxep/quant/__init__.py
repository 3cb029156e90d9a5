"""mxep.quant"""
