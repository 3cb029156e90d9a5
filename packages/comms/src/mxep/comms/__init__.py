"""mxep.comms"""
