"""mxep.integration"""
