"""mxep.ep"""
